"""Ways to break an emulated server on purpose, for everything around it that must cope."""
