"""`python -m vitreous`."""

from vitreous.cli.main import main

main()
