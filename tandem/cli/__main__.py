"""`python -m tandem.cli` is the console script, for environments where scripts aren't on the path."""

import sys

from tandem.cli.main import main

sys.exit(main())
