"""Tests of models that are split over processes."""
