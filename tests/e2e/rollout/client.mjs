// A client in another language: calls outrider.v1.Generation from the .proto files, with grpc-js, until told to stop.
// One line of JSON for each call, on standard output.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const [modules, root, address, authority, key, casesPath, thinkS] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const definition = loader.loadSync("protos/outrider/v1/generation.proto", {
  includeDirs: [root],
  keepCase: true,
  defaults: true,
});
const { Generation } = grpc.loadPackageDefinition(definition).outrider.v1;
const client = new Generation(address, grpc.credentials.createSsl(readFileSync(authority)));
const metadata = new grpc.Metadata();
metadata.set("authorization", `Bearer ${key}`);

let isStopping = false;
process.on("SIGTERM", () => { isStopping = true; });

function generate({ model, prompt, max_tokens, text }) {
  return new Promise((resolve) => {
    let said = "";
    const call = client.Generate(
      { model, prompt, sampling: { max_tokens, temperature: 0 } },
      metadata,
      { deadline: Date.now() + 60_000 },
    );
    call.on("data", (chunk) => { said += chunk.text; });
    call.on("error", (error) => resolve({ ok: false, error: `${error.code} ${error.details}` }));
    call.on("end", () => resolve({ ok: said === text, error: said === text ? "" : "another text" }));
  });
}

for (let turn = 0; !isStopping; turn += 1) {
  const cases = JSON.parse(readFileSync(casesPath)); // which change while we ask
  const asked = cases[turn % cases.length];
  console.log(JSON.stringify({ ...(await generate(asked)), model: asked.model }));
  await new Promise((resolve) => { setTimeout(resolve, 1000 * thinkS); });
}
client.close();
