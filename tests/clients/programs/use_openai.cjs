// What openai-node makes of a server. Arguments: its URL, its model.
const { OpenAI } = require("openai");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const chat = { model, messages, temperature: 0, max_completion_tokens: 12 };

async function refusal(changed) {
  try {
    await client.chat.completions.create({ ...chat, ...changed });
  } catch (error) {
    return { class: error.constructor.name, status: error.status, code: error.code };
  }
}

async function main() {
  const answer = await client.chat.completions.create(chat);
  let streamed = "";
  let usage = null;
  const stream = await client.chat.completions.create({
    ...chat,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    streamed += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  const helper = client.chat.completions.stream(chat);
  const completion = await client.completions.create({
    model,
    prompt: "The capital of France is",
    temperature: 0,
    max_tokens: 12,
  });
  const models = await client.models.list();
  console.log(
    JSON.stringify({
      chat: answer.choices[0].message.content,
      streamed,
      helper: await helper.finalContent(),
      streamed_tokens: usage.completion_tokens,
      completion: completion.choices[0].text,
      tokens: answer.usage.completion_tokens,
      models: models.data.map((entry) => entry.id),
      too_long: await refusal({ max_completion_tokens: 1e6 }),
      wrong_model: await refusal({ model: "nothing" }),
    }),
  );
}

main();
