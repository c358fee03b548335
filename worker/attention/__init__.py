"""Attention backends behind one seam."""
