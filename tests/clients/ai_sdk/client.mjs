// Vercel's AI SDK with its providers for OpenAI and for servers like it, used as its documentation shows.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { assert, check } from "./checks.mjs";

const model = process.env.OUTRIDER_MODEL;
const baseURL = process.env.OPENAI_BASE_URL;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "outrider",
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const prompt = "How is the weather in Paris?";
const schema = z.object({ sky: z.enum(["clear", "cloudy", "rainy"]), celsius: z.number().int().min(-40).max(50) });
const getWeather = tool({
  description: "Weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "London"]), days: z.number().int().min(1).max(9) }),
  execute: async ({ city, days }) => `sunny in ${city} for ${days} days`,
});

// The small model would call the tool until its context is full.
const providerOptions = { openai: { parallelToolCalls: false }, outrider: { parallel_tool_calls: false } };
const models = {
  "openai()": openai(model),
  "openai.chat()": openai.chat(model),
  "openai-compatible": compatible(model),
};

for (const [name, chosen] of Object.entries(models)) {
  await check(`${name}: generateText and streamText`, async () => {
    const asked = { model: chosen, prompt, temperature: 0, maxOutputTokens: 20, maxRetries: 0 };
    const whole = await generateText({ ...asked, system: "Be brief." });
    assert(whole.text);
    assert(whole.usage.outputTokens > 0 && whole.usage.outputTokens <= 20);
    const result = streamText({ ...asked, system: "Be brief.", onError: ({ error }) => { throw error; } });
    let text = "";
    for await (const part of result.textStream) text += part;
    assert.equal(text, whole.text);
    assert.equal((await result.usage).outputTokens, whole.usage.outputTokens);
  });

  await check(`${name}: a conversation goes on with its own messages`, async () => {
    const messages = [{ role: "user", content: prompt }];
    const asked = { model: chosen, maxOutputTokens: 10, maxRetries: 0 };
    const first = await generateText({ ...asked, messages });
    messages.push(...first.response.messages, { role: "user", content: "And tomorrow?" });
    assert((await generateText({ ...asked, messages })).text);
  });

  await check(`${name}: a tool is called, run, and its result sent back`, async () => {
    const steps = [];
    const { steps: taken } = await generateText({
      model: chosen,
      prompt,
      tools: { getWeather },
      providerOptions,
      maxOutputTokens: 200,
      maxRetries: 0,
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
      onStepFinish: ({ finishReason }) => void steps.push(finishReason),
    });
    assert.equal(steps[0], "tool-calls");
    assert.equal(taken.length, 2);
    assert.match(String(taken[0].toolResults[0].output), /^sunny in/);
    assert(taken[1].text);
  });

  await check(`${name}: a tool is called in a stream`, async () => {
    const result = streamText({
      model: chosen,
      prompt,
      tools: { getWeather },
      toolChoice: "required",
      maxRetries: 0,
      providerOptions,
    });
    const seen = [];
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      seen.push(part.type);
    }
    assert(seen.includes("tool-call") && seen.includes("tool-result"), seen.join());
  });

  await check(`${name}: generateObject and streamObject`, async () => {
    const asked = { model: chosen, prompt, schema, maxRetries: 0 };
    schema.parse((await generateObject(asked)).object);
    const result = streamObject(asked);
    for await (const _ of result.partialObjectStream);
    schema.parse(await result.object);
  });

  await check(`${name}: tools together with an output format`, async () => {
    const result = await generateText({
      model: chosen,
      prompt,
      tools: { getWeather },
      providerOptions,
      maxRetries: 0,
      output: Output.object({ schema }),
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    });
    schema.parse(result.output);
  });
}

await check("openai.completion() and the compatible completionModel()", async () => {
  for (const chosen of [openai.completion(model), compatible.completionModel(model)]) {
    const asked = { model: chosen, prompt: "def read_file(path):\n", temperature: 0, maxOutputTokens: 10, maxRetries: 0 };
    const { text } = await generateText(asked);
    let streamed = "";
    for await (const part of streamText(asked).textStream) streamed += part;
    assert.equal(streamed, text);
  }
});

await check("errors are APICallErrors with the server's reason", async () => {
  for (const chosen of [openai("no-such-model"), openai.chat("no-such-model")]) {
    await assert.rejects(generateText({ model: chosen, prompt, maxRetries: 0 }), (error) => {
      assert(APICallError.isInstance(error), String(error));
      assert.equal(error.statusCode, 404);
      assert.match(error.message, /no-such-model/);
      return true;
    });
  }
});
