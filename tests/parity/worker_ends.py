"""A worker of the comparison that ends as its job says."""

import os
import signal
import time

RECORD = {
    "variant": "llama", "dtype": "bfloat16", "case": "rows", "quantity": "y", "parity_ratio": 3.5, "bound": 2.0,
    "bit_identical": 0.75, "identical_bound": 0.999, "max_ulp": 1.0, "passed": False, "detail": "at (0, 0) got 1.0",
}  # fmt: skip


def end(job, write):
    name = job["end"]
    if name == "numpy":
        loud(job, write)
    elif name == "chatty":
        print("WARNING: a framework speaks\n3\n{}", flush=True)
    elif name == "raised":
        raise RuntimeError("cannot load the library")
    elif name == "absent":
        write(status="absent", message="pip install it")
    elif name != "silent":
        write(hello="9.9", device="cpu", doing="the case 'rows'")
        if name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "hung":
            time.sleep(600)
        write(records=[RECORD])
        if name == "exits":
            os._exit(0)


def loud(job, write):
    """The comparison with NumPy, in which a framework prints to the standard output of the process."""
    from rmsnorm.parity import backends, run

    open_backend = backends.open_backend

    def open_loud(*how):
        version, norm = open_backend(*how)
        return version, lambda data: (os.write(1, b"step 7 "), norm(data))[1]

    backends.open_backend = open_loud
    os.write(1, b"hello ")
    run.compare_backend(job, write)
