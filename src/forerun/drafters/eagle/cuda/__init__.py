"""EAGLE-3 heads on a GPU: the head's layer, tree growth and draft graphs. The only drafters that import models.cuda."""
