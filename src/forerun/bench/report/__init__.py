"""What a benchmark shows: terminal tables, an HTML page, plots."""
