// The `openai` package for JavaScript, used as its README and OpenAI's guides show.
import OpenAI, { toFile } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { assert, check } from "./checks.mjs";

const model = process.env.OUTRIDER_MODEL;
const prompt = "def read_file(path):\n";
const messages = [{ role: "user", content: "How is the weather in Paris?" }];
const client = new OpenAI({ maxRetries: 0, timeout: 60_000 });
const Weather = z.object({ sky: z.enum(["clear", "cloudy", "rainy"]), celsius: z.number().int().min(-40).max(50) });
const parameters = {
  type: "object",
  properties: { city: { enum: ["Paris", "London"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", description: "Weather of a city.", parameters } };

await check("models.list and models.retrieve", async () => {
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  assert(ids.includes(model));
  assert.equal((await client.models.retrieve(model)).object, "model");
});

await check("completions.create, whole and streamed", async () => {
  const asked = { model, prompt, max_tokens: 20, temperature: 0 };
  const answer = await client.completions.create(asked);
  assert.equal(answer.usage.completion_tokens, 20);
  const stream = await client.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  assert.equal(chunks.map(({ choices }) => choices[0]?.text ?? "").join(""), answer.choices[0].text);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.total_tokens, answer.usage.total_tokens);
});

await check("completions.create with several prompts, echo and logprobs", async () => {
  const asked = { model, prompt: [prompt, "import os\n"], max_tokens: 4, temperature: 0, echo: true, logprobs: 1 };
  const { choices } = await client.completions.create(asked);
  assert.deepEqual(choices.map(({ index }) => index), [0, 1]);
  assert(choices[0].text.startsWith(prompt));
  assert.equal(choices[0].logprobs.tokens.join(""), choices[0].text);
});

await check("chat.completions.create, whole and streamed; its message is sent back", async () => {
  const asked = { model, messages, max_completion_tokens: 20, temperature: 0 };
  const answer = await client.chat.completions.create(asked);
  const stream = await client.chat.completions.create({ ...asked, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, answer.choices[0].message.content);
  const more = [...messages, answer.choices[0].message, { role: "user", content: "And tomorrow?" }];
  const again = await client.chat.completions.create({ ...asked, messages: more });
  assert(again.usage.prompt_tokens > answer.usage.prompt_tokens);
});

await check("a tool is called, and its result sent back", async () => {
  const asked = { model, tools: [tool], temperature: 0 };
  const answer = await client.chat.completions.create({ ...asked, messages, tool_choice: "required", parallel_tool_calls: false });
  const { message, finish_reason: reason } = answer.choices[0];
  assert.equal(reason, "tool_calls");
  assert.deepEqual(Object.keys(JSON.parse(message.tool_calls[0].function.arguments)).sort(), ["city", "days"]);
  const results = message.tool_calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: "sunny" }));
  const more = [...messages, message, ...results];
  const next = await client.chat.completions.create({ ...asked, messages: more, tool_choice: "none", max_tokens: 10 });
  assert(next.choices[0].message.content);
});

await check("the first entry of each delta has the whole call of a stream", async () => {
  const choice = { type: "function", function: { name: "get_weather" } };
  const stream = await client.chat.completions.create({ model, messages, tools: [tool], tool_choice: choice, stream: true });
  let name = "";
  let args = "";
  for await (const chunk of stream) {
    const entry = chunk.choices[0]?.delta?.tool_calls?.[0];
    name += entry?.function?.name ?? "";
    args += entry?.function?.arguments ?? "";
  }
  assert.equal(name, "get_weather");
  assert.deepEqual(Object.keys(JSON.parse(args)).sort(), ["city", "days"]);
});

await check("chat.completions.stream with its events", async () => {
  const runner = client.chat.completions.stream({ model, messages, max_tokens: 20, temperature: 0 });
  let text = "";
  runner.on("content", (delta) => (text += delta));
  const final = await runner.finalChatCompletion();
  assert.equal(text, final.choices[0].message.content);
  assert.equal((await runner.finalMessage()).role, "assistant");
});

await check("chat.completions.runTools calls a function", async () => {
  const called = [];
  const run = (args) => called.push(args) && "sunny";
  const runner = client.chat.completions.runTools(
    {
      model,
      messages,
      temperature: 0,
      parallel_tool_calls: false,
      max_tokens: 200,
      tools: [{ type: "function", function: { ...tool.function, function: run, parse: JSON.parse } }],
      tool_choice: { type: "function", function: { name: "get_weather" } },
    },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert.deepEqual(Object.keys(called[0]).sort(), ["city", "days"]);
});

await check("structured output: chat.completions.parse", async () => {
  const format = zodResponseFormat(Weather, "weather");
  const answer = await client.chat.completions.parse({ model, messages, response_format: format });
  Weather.parse(answer.choices[0].message.parsed);
});

await check("errors are typed exceptions", async () => {
  const asked = { model, messages, max_tokens: 1 };
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: 9 }), OpenAI.BadRequestError);
  await assert.rejects(client.chat.completions.create({ ...asked, model: "no-such-model" }), (error) => {
    assert(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
    return true;
  });
});

await check("a stream may be left", async () => {
  const stream = await client.completions.create({ model, prompt, max_tokens: 300, stream: true });
  for await (const _ of stream) break;
  assert((await client.models.list()).data.length);
});

await check("responses.create, whole and streamed", async () => {
  const asked = { model, input: "Name a city.", max_output_tokens: 20, temperature: 0 };
  const answer = await client.responses.create(asked);
  assert(answer.output_text);
  let text = "";
  let last;
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  assert.equal(text, answer.output_text);
  assert(["response.completed", "response.incomplete"].includes(last.type), last.type);
  const final = await client.responses.stream(asked).finalResponse();
  assert.equal(final.output_text, answer.output_text);
});

await check("responses.create with previous_response_id and with a tool", async () => {
  const first = await client.responses.create({ model, input: "Name a city.", max_output_tokens: 10 });
  const asked = { model, previous_response_id: first.id, input: "How is the weather there?" };
  const tools = [{ type: "function", strict: true, ...tool.function }];
  const second = await client.responses.create({ ...asked, tools, tool_choice: "required", parallel_tool_calls: false });
  const call = second.output.find(({ type }) => type === "function_call");
  assert.deepEqual(Object.keys(JSON.parse(call.arguments)).sort(), ["city", "days"]);
  const output = [{ type: "function_call_output", call_id: call.call_id, output: "sunny" }];
  const third = await client.responses.create({
    model,
    input: output,
    previous_response_id: second.id,
    max_output_tokens: 10,
  });
  assert(third.output_text);
});

await check("responses.parse", async () => {
  const format = zodTextFormat(Weather, "weather");
  const answer = await client.responses.parse({ model, input: "How is the weather?", text: { format } });
  Weather.parse(answer.output_parsed);
});

await check("files and batches", async () => {
  const body = { model, prompt, max_tokens: 10, temperature: 0 };
  const line = { custom_id: "one", method: "POST", url: "/v1/completions", body };
  const content = await toFile(Buffer.from(`${JSON.stringify(line)}\n`), "requests.jsonl");
  const file = await client.files.create({ file: content, purpose: "batch" });
  let batch = await client.batches.create({
    input_file_id: file.id,
    endpoint: "/v1/completions",
    completion_window: "24h",
  });
  while (["validating", "in_progress", "finalizing"].includes(batch.status)) {
    await new Promise((resolve) => setTimeout(resolve, 500));
    batch = await client.batches.retrieve(batch.id);
  }
  assert.equal(batch.status, "completed");
  const [answered] = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n");
  const { choices } = JSON.parse(answered).response.body;
  assert.equal(choices[0].text, (await client.completions.create(body)).choices[0].text);
  for (const name of [file.id, batch.output_file_id]) assert((await client.files.delete(name)).deleted);
});
