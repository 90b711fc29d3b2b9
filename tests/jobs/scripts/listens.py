"""A script in the place of a notebook: listens at an address for jobs on other machines, and steers them."""

import json
import sys
import threading
import time
from pathlib import Path

import graftlab as gl

address, folder, stop = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])


def wait_until(condition, what):
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        threading.Event().wait(0.01)


said = {}
session = gl.listen(baseline=1, target=2, address=address, folder=folder, timeout=120)
wait_until(lambda: session.row_count > 4, "rows")
wait_until(lambda: session.status()["taps"].min() > 0, "word of where each rank is")
said["links"] = session.status()["links"].tolist()
said["states"] = sorted(set(session.status()["state"]))
plan = session.edit(b2t="layer == 0", keep="layer == 0")
wait_until(lambda: len(session.adopted(plan.version)) == 3, "the plan in force")
said["steps"] = len(set(session.adopted(plan.version).values()))
wait_until(lambda: (session.frame["status"] == "grafted").any(), "a graft")
baseline, target = session.tensors("hidden", layer=0)
said["kept"] = [baseline.tolist(), target.tolist()]
said["stacks"] = [rank for rank, text in session.stacks().items() if "goes_on.py" in text]
session.close()
token = (folder / ".rendezvous" / "token").read_text()

again = gl.listen(baseline=1, target=2, address=address, folder=folder, append=True, timeout=120)
before = again.row_count
wait_until(lambda: again.row_count > before, "rows of jobs that were taken over")
said["plan"] = again.plan.b2t
said["same token"] = (folder / ".rendezvous" / "token").read_text() == token
wait_until(lambda: all(again.status()["links"]), "word of the links")
said["links again"] = again.status()["links"].tolist()
stop.touch()
wait_until(lambda: again.runs[-1].done, "the end of the run")
said["failures"] = again.runs[-1].failures
again.close()
print(json.dumps(said))
