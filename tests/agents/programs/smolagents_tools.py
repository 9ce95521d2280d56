"""smolagents' tool-calling agent: it ends by calling `final_answer`."""

import sys

import smolagents


@smolagents.tool
def look(where: str) -> str:
    """Looks somewhere.

    Args:
        where: Where to look.
    """
    return f"{where}: a ball"


# Its default, "required", asks the server to force a call; the server refuses, since forced tokens are not sampled.
model = smolagents.OpenAIModel(model_id="policy", api_base=sys.argv[1] + "/v1", api_key="none", tool_choice="auto")
agent = smolagents.ToolCallingAgent(tools=[look], model=model, max_steps=4, verbosity_level=0)
print(agent.run("What is in the box?"))
