"""Finding the schedule: candidates, fair trials on real iterations, lower bounds."""
