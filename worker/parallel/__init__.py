"""One model split over several processes, by heads."""
