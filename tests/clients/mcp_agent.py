"""An agent whose tools come from a server of the Model Context Protocol: the tool is listed and run
with the package ``mcp``, and asked for with openai's. Prints one JSON line.

Runs in an environment of its own: ``python mcp_agent.py URL KEY MODEL``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from asking import ASKED, MESSAGES
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

SERVE = "--serve-tools"


def serve_tools() -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("tools")

    @server.tool()
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Tells the weather."""
        return f"It rains in {city}."

    server.run()


async def asked(url: str, key: str, model: str) -> dict[str, Any]:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    own = StdioServerParameters(command=sys.executable, args=[__file__, SERVE])
    async with stdio_client(own) as (reads, writes), ClientSession(reads, writes) as session:
        await session.initialize()
        (tool,) = (await session.list_tools()).tools
        schema: Any = {**tool.input_schema, "additionalProperties": False}
        function: Any = {"name": tool.name, "parameters": schema, "strict": True}
        tools: Any = [{"type": "function", "function": function}]
        create = client.chat.completions.create
        told = await create(
            model=model, messages=MESSAGES, tools=tools, tool_choice="required", **ASKED
        )
        calls: Any = told.choices[0].message.tool_calls
        arguments = json.loads(calls[0].function.arguments)
        result: Any = await session.call_tool(calls[0].function.name, arguments)
    return {"city": arguments["city"], "result": result.content[0].text}


if __name__ == "__main__":
    if SERVE in sys.argv:
        serve_tools()
    else:
        print(json.dumps(asyncio.run(asked(*sys.argv[1:]))))
