"""The server over several replicas, as a Ray Serve application."""
