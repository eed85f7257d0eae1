"""What the product costs, measured beside what people would use instead: ``python -m benchmarks``.

Each module has `CASES`, functions from `Settings` to a `Result`, by name.
"""
