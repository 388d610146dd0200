"""``python -m eagle3nb`` is the command ``eagle3nb``."""

import sys

from eagle3nb.cli import main

sys.exit(main())
