"""The official OpenAI SDK, synchronous, in a tool loop."""

import json
import sys

import openai

base_url = sys.argv[1] + "/v1"
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
messages = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "What is in the box?"}]
for _ in range(5):
    message = client.chat.completions.create(model="policy", messages=messages, tools=[LOOK]).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        found = f"{json.loads(call.function.arguments).get('where')}: a ball"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
print(message.content)
