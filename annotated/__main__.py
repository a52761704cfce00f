"""`python -m annotated`, also under torchrun: the commands of `annotated.cli`."""

import sys

from annotated.cli import main

sys.exit(main())
