"""Runs `python -m command_line`, the `outrider` command where it is not installed, such as in an image."""

from command_line import main

if __name__ == "__main__":
    main()
