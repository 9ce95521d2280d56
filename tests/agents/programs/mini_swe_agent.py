"""mini-swe-agent: bash in a folder, until it submits."""

import sys
import tempfile

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

model = LitellmModel(
    model_name="openai/policy",
    model_kwargs={"api_base": sys.argv[1] + "/v1", "api_key": "none"},
    cost_tracking="ignore_errors",
)
with tempfile.TemporaryDirectory() as folder:
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=folder),
        system_template="You use bash.",
        instance_template="Do this: {{ task }}",
        step_limit=4,
    )
    print(agent.run("write a file").get("submission", "").strip())
