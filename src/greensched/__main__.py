"""`python -m greensched`."""

from greensched.cli import main

raise SystemExit(main())
