"""Qwen Code, the npm coding agent, headless in a folder: its own prompt, tools and stream."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

QUIET = {
    "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
    "privacy": {"usageStatisticsEnabled": False},
}
with tempfile.TemporaryDirectory() as name:
    home, work = Path(name, "home"), Path(name, "work")
    work.mkdir()
    (home / ".qwen").mkdir(parents=True)
    (home / ".qwen" / "settings.json").write_text(json.dumps(QUIET))
    policy = {"OPENAI_BASE_URL": sys.argv[1] + "/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "policy"}
    agent = Path(sys.prefix, "node_modules", ".bin", "qwen")
    done = subprocess.run(
        ["node", str(agent), "--auth-type", "openai", "--yolo", "-p", "Write hello to x."],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **policy},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    print((work / "x").read_text().strip())
