"""What users measure with: `forerun bench`, `compare`, `advise`, `diagnose`, `plan` and `quality`."""
