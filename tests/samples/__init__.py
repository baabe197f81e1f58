"""Training loops that several tests compile."""
