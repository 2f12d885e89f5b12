// Checks that the programs in JavaScript share: each one is a function, its result one line of JSON on standard output.
import assert from "node:assert/strict";

export { assert };

export async function check(name, run) {
  try {
    await run();
    console.log(JSON.stringify({ check: name, ok: true }));
  } catch (error) {
    process.exitCode = 1;
    console.error(error);
    console.log(JSON.stringify({ check: name, ok: false, error: String(error) }));
  }
}
