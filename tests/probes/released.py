"""The released TRL that `--released DIR` names, first on the path: imported before anything of TRL."""

import sys

if "--released" in sys.argv:
    place = sys.argv.index("--released")
    sys.path.insert(0, sys.argv[place + 1])
    del sys.argv[place : place + 2]
