"""Tools for tests: generated and sample programs, comparisons, faults. May import every layer."""
