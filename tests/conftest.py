"""What holds for all tests."""

import os

# Threads that wait for the others sleep. Spinning, as OpenMP does by default, makes a run of thousands of small calls
# several times longer where other programs use the cores too. Read when torch is imported, so it stands here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
