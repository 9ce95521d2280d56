"""Keep a slow name server out of the tests.

torch's TCPStore looks up the name of every peer that connects, only to print it; a resolver that drops the question
costs the libc default of five seconds each time.
"""

import os

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
