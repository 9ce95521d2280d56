"""The official OpenAI SDK, asynchronous and streaming, with a follow-up question."""

import asyncio
import sys

import openai


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Tell me a story."}]
    for question in ("And then?", None):
        text, pieces = "", 0
        async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
            if chunk.choices and chunk.choices[0].delta.content:
                text += chunk.choices[0].delta.content
                pieces += 1
        messages.append({"role": "assistant", "content": text})
        if question:
            messages.append({"role": "user", "content": question})
    assert pieces > 1, "the answer came in one piece"
    print(text)


asyncio.run(main())
