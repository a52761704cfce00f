"""`python -m annotated`, also under torchrun: the commands of `annotated.terminal`."""

import sys

from annotated.terminal import main

sys.exit(main())
