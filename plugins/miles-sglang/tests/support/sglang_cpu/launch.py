"""`python -m sglang_cpu.launch ARGS`: SGLang's own launcher after the boot; spawned children import this module too."""

import runpy
import sys

import sglang_cpu.boot

assert sglang_cpu.boot.KERNEL_NAMES  # the import is the point

if __name__ == "__main__":
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
