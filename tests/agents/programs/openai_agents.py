"""The OpenAI Agents SDK: its own loop, its own tool schema."""

import sys

import agents
import openai

agents.set_tracing_disabled(True)


@agents.function_tool
def look(where: str) -> str:
    """Looks somewhere."""
    return f"{where}: a ball"


client = openai.AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
agent = agents.Agent(name="finder", instructions="Use tools.", model=model, tools=[look])
print(agents.Runner.run_sync(agent, "What is in the box?").final_output)
