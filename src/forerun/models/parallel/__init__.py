"""Tensor parallel: one decoder split over several processes, each with a part of the heads, layers and vocabulary."""
