"""The controller in simulation: rounds whose time is counted and whose acceptance is known; no engine runs."""
