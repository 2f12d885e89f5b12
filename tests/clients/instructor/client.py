"""instructor around the `openai` package, used as its documentation shows."""

import os
from typing import Literal

import instructor
from checks import check, equal, finish
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

MODEL = os.environ["OUTRIDER_MODEL"]
MESSAGES = [{"role": "user", "content": "How is the weather in Paris?"}]
ASKED = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 300, "max_retries": 0}


class Weather(BaseModel):
    """How the weather is."""

    sky: Literal["clear", "cloudy", "rainy"]
    celsius: int = Field(ge=-40, le=50)
    words: str = Field(max_length=40)


for name in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
    mode = instructor.Mode[name]

    @check(f"{name}: create")
    def _(mode: instructor.Mode = mode) -> None:
        client = instructor.from_openai(OpenAI(max_retries=0, timeout=60), mode=mode)
        weather, completion = client.chat.completions.create_with_completion(response_model=Weather, **ASKED)
        assert isinstance(weather, Weather)
        equal(completion.object, "chat.completion")

    @check(f"{name}: create_partial")
    def _(mode: instructor.Mode = mode) -> None:
        client = instructor.from_openai(OpenAI(max_retries=0, timeout=60), mode=mode)
        seen = list(client.chat.completions.create_partial(response_model=Weather, **ASKED))
        assert len(seen) > 1
        Weather.model_validate(seen[-1].model_dump())


@check("TOOLS: create_partial, asynchronously")
async def _() -> None:
    client = instructor.from_openai(AsyncOpenAI(max_retries=0, timeout=60))
    seen = [each async for each in client.chat.completions.create_partial(response_model=Weather, **ASKED)]
    Weather.model_validate(seen[-1].model_dump())


finish()
