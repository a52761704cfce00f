#!/usr/bin/env bash
# Every row of Table 3 on Multi30k for page 21, three seeds each, a process a run: `make variations`. What is there is not run again.
source "$(dirname "$0")/environment.sh"
annotated vary multi30k --out results/variations
