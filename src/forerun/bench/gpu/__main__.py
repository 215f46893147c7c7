"""`python -m forerun.bench.gpu`."""

from forerun.bench.gpu.command import main

main()
