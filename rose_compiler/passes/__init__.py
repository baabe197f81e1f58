"""Rewrites of programs: one pass, one file, one golden folder, one name."""
