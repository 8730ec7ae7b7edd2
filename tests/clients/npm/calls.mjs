// node calls.mjs CALL URL INPUT: calls the server at URL by one client, with INPUT (an object, JSON), and writes
// what the client returns, or {error: {name, status, message}}, as JSON. Packages are loaded by the call that needs them.

const key = "none";

async function openai(url, options = {}) {
  const { default: OpenAI } = await import("openai");
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, ...options });
}

async function cohere(url) {
  const { CohereClient } = await import("cohere-ai");
  return new CohereClient({ token: key, environment: `${url}/cohere` });
}

async function cohereV2(url) {
  const { CohereClientV2 } = await import("cohere-ai");
  return new CohereClientV2({ token: key, environment: `${url}/cohere` });
}

async function voyage(url) {
  const { VoyageAIClient } = await import("voyageai");
  return new VoyageAIClient({ apiKey: key, environment: `${url}/voyage/v1` });
}

async function inference(url) {
  const { InferenceClient } = await import("@huggingface/inference");
  return (path) => new InferenceClient().endpoint(url + path);
}

async function begun(client, content) {
  const file = await client.files.create({ file: content, purpose: "batch" });
  const fields = { input_file_id: file.id, endpoint: "/v1/embeddings", completion_window: "24h" };
  return await client.batches.create(fields);
}

async function ended(client, id) {
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

async function answers(client, fileId) {
  const content = await (await client.files.content(fileId)).text();
  return content.trim().split("\n").map((line) => JSON.parse(line));
}

const ranks = (results) => results.map((one) => [one.index, one.relevanceScore]);

const calls = {
  async "openai embeddings"(url, { texts }) {
    const answer = await (await openai(url)).embeddings.create({ model: "embedder", input: texts });
    return { vectors: answer.data.map((item) => item.embedding), tokens: answer.usage.total_tokens };
  },
  async "openai dimensions"(url, { texts }) {
    const asked = { model: "embedder", input: texts, dimensions: 8, encoding_format: "float" };
    return (await (await openai(url)).embeddings.create(asked)).data.map((item) => item.embedding);
  },
  async "openai batch"(url, { texts }) {
    const client = await openai(url);
    const asked = texts.map((text, index) => ({
      custom_id: `c${index}`, method: "POST", url: "/v1/embeddings", body: { model: "embedder", input: text },
    }));
    const { toFile } = await import("openai");
    const lines = asked.map((one) => JSON.stringify(one)).join("\n");
    const started = await begun(client, await toFile(Buffer.from(lines), "in.jsonl"));
    const batch = await ended(client, started.id);
    const found = await answers(client, batch.output_file_id);
    await client.files.delete(batch.input_file_id);
    const left = [];
    for await (const one of client.files.list()) left.push(one.purpose);
    return { vectors: found.map((one) => one.response.body.data[0].embedding), counts: batch.request_counts, left };
  },
  async "openai batch begun"(url, { path }) {
    const { createReadStream } = await import("node:fs");
    return (await begun(await openai(url), createReadStream(path))).id;
  },
  async "openai batch ended"(url, { id }) {
    const client = await openai(url);
    const batch = await ended(client, id);
    const files = [batch.output_file_id, batch.error_file_id];
    const [done, failed] = await Promise.all(files.map((file) => answers(client, file)));
    return { status: batch.status, done: done.map((one) => one.custom_id), failed: failed.map((one) => one.custom_id) };
  },
  async "openai unknown model"(url) {
    return await (await openai(url)).embeddings.create({ model: "nothing", input: "a" });
  },
  async "openai too long"(url) {
    const client = await openai(url, { baseURL: `${url}/vllm/v1` });
    return await client.embeddings.create({ model: "embedder", input: "cat ".repeat(200) });
  },
  async "cohere embed"(url, { texts }) {
    const asked = { model: "embedder", texts, inputType: "search_document", embeddingTypes: ["float"] };
    return (await (await cohereV2(url)).embed(asked)).embeddings.float;
  },
  async "cohere rerank"(url, { texts, query }) {
    const asked = { model: "reranker", query, documents: texts, topN: 2 };
    return ranks((await (await cohereV2(url)).rerank(asked)).results);
  },
  async "langchain openai"(url, { texts }) {
    const { OpenAIEmbeddings } = await import("@langchain/openai");
    const fields = { model: "embedder", apiKey: key, configuration: { baseURL: `${url}/v1` } };
    const embeddings = new OpenAIEmbeddings(fields);
    return { vectors: await embeddings.embedDocuments(texts), first: await embeddings.embedQuery(texts[0]) };
  },
  async "langchain cohere"(url, { texts }) {
    const { CohereEmbeddings } = await import("@langchain/cohere");
    const embeddings = new CohereEmbeddings({ model: "embedder", client: await cohere(url) });
    return { vectors: await embeddings.embedDocuments(texts), first: await embeddings.embedQuery(texts[0]) };
  },
  async "langchain rerank"(url, { texts, query }) {
    const { CohereRerank } = await import("@langchain/cohere");
    const rerank = new CohereRerank({ model: "reranker", topN: 2, client: await cohere(url) });
    return ranks(await rerank.rerank(texts, query));
  },
  async "llamaindex openai"(url, { texts }) {
    const { OpenAIEmbedding } = await import("@llamaindex/openai");
    const embedding = new OpenAIEmbedding({ model: "embedder", apiKey: key, baseURL: `${url}/v1`, maxRetries: 0 });
    return { vectors: await embedding.getTextEmbeddings(texts), first: await embedding.getTextEmbedding(texts[0]) };
  },
  async "ai openai"(url, { texts }) {
    const { embed, embedMany } = await import("ai");
    const { createOpenAI } = await import("@ai-sdk/openai");
    const model = createOpenAI({ baseURL: `${url}/v1`, apiKey: key }).embeddingModel("embedder");
    const many = await embedMany({ model, values: texts, maxRetries: 0 });
    const one = await embed({ model, value: texts[0], maxRetries: 0 });
    return { vectors: many.embeddings, first: one.embedding, tokens: many.usage.tokens };
  },
  async "ai compatible"(url, { texts }) {
    const { embedMany } = await import("ai");
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    const provider = createOpenAICompatible({ name: "bei", baseURL: `${url}/v1`, apiKey: key });
    const model = provider.embeddingModel("embedder");
    return (await embedMany({ model, values: texts, maxRetries: 0 })).embeddings;
  },
  async "voyage embed"(url, { texts }) {
    const answer = await (await voyage(url)).embed({ model: "embedder", input: texts });
    return { vectors: answer.data.map((item) => item.embedding), tokens: answer.usage.totalTokens };
  },
  async "voyage rerank"(url, { texts, query }) {
    const asked = { model: "reranker", query, documents: texts, topK: 2 };
    return ranks((await (await voyage(url)).rerank(asked)).data);
  },
  async "chroma openai"(url, { texts }) {
    const { OpenAIEmbeddingFunction } = await import("@chroma-core/openai");
    const fields = { apiKey: key, modelName: "embedder", apiBase: `${url}/v1` };
    return await new OpenAIEmbeddingFunction(fields).generate(texts);
  },
  async "huggingface features"(url, { texts }) {
    return await (await inference(url))("/tei/embed").featureExtraction({ inputs: texts });
  },
  async "huggingface features at the root"(url, { texts }) {
    return await (await inference(url))("/tei").featureExtraction({ inputs: texts });
  },
  async "huggingface classes"(url, { texts }) {
    return await (await inference(url))("/tei").textClassification({ inputs: texts[0], parameters: {} });
  },
  async "huggingface classes without parameters"(url, { texts }) {
    return await (await inference(url))("/tei").textClassification({ inputs: texts[0] });
  },
  async "huggingface similarity"(url, { texts }) {
    const client = (await inference(url))("/tei/similarity");
    return await client.sentenceSimilarity({ inputs: { source_sentence: texts[0], sentences: texts.slice(1) } });
  },
};

const [name, url, input] = process.argv.slice(2);
try {
  console.log(JSON.stringify(await calls[name](url, JSON.parse(input))));
} catch (error) {
  const { name: kind, status, statusCode, message, httpResponse } = error;
  const found = status ?? statusCode ?? httpResponse?.status;
  console.log(JSON.stringify({ error: { name: kind, status: found, message, code: error.code } }));
}
