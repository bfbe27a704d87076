"""Which kernel a product on a GPU should run: what a model expects, what was measured, where that is kept."""
