// A client in JavaScript that has no .proto file of ours: it learns the service by reflection, as grpcurl does, and calls it.
//
//   npm install && node client.mjs HOST:PORT
//
// One line of JSON for each check, on standard output; exit status 1 if one failed.
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";
import { protoPath as healthProto } from "grpc-health-check";

const DEADLINE_MS = 60_000;
const OPTIONS = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
const GENERATION = "outrider.v1.Generation";
const address = process.env.OUTRIDER_GRPC ?? process.argv[2];
const credentials = grpc.credentials.createInsecure();
const deadline = () => ({ deadline: Date.now() + DEADLINE_MS });

const reflectionFolder = dirname(createRequire(import.meta.url).resolve("@grpc/reflection/package.json"));
const reflectionProto = join(reflectionFolder, "build/proto/grpc/reflection/v1/reflection.proto");

function loaded(file) {
  return grpc.loadPackageDefinition(loader.loadSync(file, { ...OPTIONS, includeDirs: [dirname(file)] }));
}

// Each question is asked when the answer before has come; the stream ends at the end.
async function reflected(service) {
  const { ServerReflection } = loaded(reflectionProto).grpc.reflection.v1;
  const client = new ServerReflection(address, credentials);
  const call = client.ServerReflectionInfo(deadline());
  const answers = call[Symbol.asyncIterator]();
  const ask = async (question) => {
    call.write(question);
    const { value } = await answers.next();
    if (value.error_response) throw new Error(value.error_response.error_message);
    return value;
  };
  const services = (await ask({ list_services: "" })).list_services_response.service.map(({ name }) => name);
  const file = await ask({ file_containing_symbol: service });
  call.end();
  client.close();
  const files = file.file_descriptor_response.file_descriptor_proto.map((raw) => field(1, raw));
  return { services, definition: loader.loadFileDescriptorSetFromBuffer(Buffer.concat(files), OPTIONS) };
}

// A bytes field as it is in a message: the files together are a FileDescriptorSet.
function field(number, raw) {
  const length = [];
  for (let rest = raw.length; ; rest >>>= 7) {
    length.push(rest > 127 ? (rest & 127) | 128 : rest);
    if (rest <= 127) break;
  }
  return Buffer.concat([Buffer.from([(number << 3) | 2, ...length]), raw]);
}

function unary(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, deadline(), (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

async function streamed(call) {
  const chunks = [];
  for await (const chunk of call) chunks.push(chunk);
  const last = chunks.at(-1);
  return { text: chunks.map(({ text }) => text).join(""), ...last?.finished };
}

async function codeOf(promise) {
  try {
    await promise;
    return grpc.status.OK;
  } catch (error) {
    return error.code;
  }
}

function expect(actual, expected) {
  if (JSON.stringify(actual) !== JSON.stringify(expected)) {
    throw new Error(`${JSON.stringify(actual)} instead of ${JSON.stringify(expected)}`);
  }
}

let numFailed = 0;
async function check(name, run) {
  try {
    await run();
    console.log(JSON.stringify({ check: name, ok: true }));
  } catch (error) {
    numFailed += 1;
    console.log(JSON.stringify({ check: name, ok: false, error: String(error) }));
  }
}

const { Health } = loaded(healthProto).grpc.health.v1;
const health = new Health(address, credentials);
await check("health: Check", async () => {
  for (const service of ["", GENERATION]) {
    expect((await unary(health, "Check", { service })).status, "SERVING");
  }
  expect(await codeOf(unary(health, "Check", { service: "no.such.Service" })), grpc.status.NOT_FOUND);
});
await check("health: Watch", async () => {
  const call = health.Watch({ service: GENERATION }, deadline());
  const { value } = await call[Symbol.asyncIterator]().next();
  call.on("error", () => {}); // our own cancellation
  call.cancel();
  expect(value.status, "SERVING");
});

let generation;
await check("reflection: the service without a .proto file", async () => {
  const { services, definition } = await reflected(GENERATION);
  expect([GENERATION, "grpc.health.v1.Health"].every((name) => services.includes(name)), true);
  generation = new (grpc.loadPackageDefinition(definition).outrider.v1.Generation)(address, credentials);
});

const prompt = "def read_file(path):\n";
const ask = (fields) => streamed(generation.Generate({ prompt, ...fields }, deadline()));
await check("ListModels", async () => {
  const { models } = await unary(generation, "ListModels", {});
  expect(models.length > 0 && models.every(({ max_model_len }) => max_model_len > 0), true);
});
await check("Generate: a temperature of 0 is greedy", async () => {
  const sampling = { temperature: 0, max_tokens: 20 };
  const [one, other] = [await ask({ sampling }), await ask({ sampling })];
  expect([one.decoding_mode, one.num_output_tokens], ["DECODING_MODE_GREEDY", 20]);
  expect(other.text, one.text);
});
await check("Generate: unset fields have the defaults of the HTTP API", async () => {
  for (const sampling of [undefined, {}, { top_k: 5 }]) {
    const answer = await ask({ sampling });
    expect(answer.decoding_mode, "DECODING_MODE_COUPLED");
    expect(answer.finish_reason === "stop" || answer.num_output_tokens === 16, true);
  }
});
await check("Generate: a seed repeats the output", async () => {
  const sampling = { seed: "7", max_tokens: 20 };
  expect((await ask({ sampling })).text, (await ask({ sampling })).text);
  const { text, seed } = await ask({ sampling: { max_tokens: 20 } });
  expect((await ask({ sampling: { max_tokens: 20, seed } })).text, text);
});
await check("Generate: a value out of its bound is refused", async () => {
  expect(await codeOf(ask({ sampling: { top_p: 1.5 } })), grpc.status.INVALID_ARGUMENT);
});
await check("Generate: a client may leave", async () => {
  const call = generation.Generate({ prompt, sampling: { temperature: 0, max_tokens: 400, ignore_eos: true } }, deadline());
  const rest = streamed(call);
  call.once("data", () => call.cancel());
  expect(await codeOf(rest), grpc.status.CANCELLED);
});
generation?.close();
health.close();
process.exitCode = numFailed ? 1 : 0;
