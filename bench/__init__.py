"""Measurements of whole training iterations; nothing in the package imports this."""

import os

# what tuning finds is part of what is measured: it begins anew in every run
os.environ.setdefault("ROSE_CACHE", "0")
