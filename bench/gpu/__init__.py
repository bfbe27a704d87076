"""The checks and figures that need a GPU: `python -m bench.gpu OUT` (see __main__.py)."""
