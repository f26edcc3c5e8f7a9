"""`python -m greensched`."""

from greensched.cli.main import main

raise SystemExit(main())
