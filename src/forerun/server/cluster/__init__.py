"""Several machines: the server as a Ray Serve application, and training data made by many workers."""
