"""`python -m ttftprof` is the program `ttftprof`."""

from ttftprof.cli import main

main()
