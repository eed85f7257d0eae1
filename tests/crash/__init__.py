"""A seeded driver that breaks everything on purpose: `python -m tests.crash --seeds 20`."""
