"""Reports of a benchmark: terminal tables, an HTML page, plots."""
