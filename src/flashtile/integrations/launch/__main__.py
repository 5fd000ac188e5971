import sys

from flashtile.integrations.launch import main

sys.exit(main(sys.argv[1:]))
