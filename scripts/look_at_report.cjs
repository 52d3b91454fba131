// What a browser makes of a report: screenshots to look at, and what must not be there. Fails if anything of it is.
//
//   npm install playwright-core axe-core                          (in another folder: NODE_PATH=THAT/node_modules)
//   node scripts/look_at_report.cjs report.html SHOTS/prefix      ($CHROMIUM: default /usr/bin/chromium)
//
// At 1280 and 390 pixels, light and dark, without a network: messages on the console, requests, sideways scrolling, what axe finds
// (contrast too), milliseconds until it is painted; then, under the page's own policy, the filter, a sorted table, and a print.
const fs = require("fs");
const path = require("path");
const { chromium } = require("playwright-core");

const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const [file, prefix] = process.argv.slice(2);
const options = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync"];
let wrong = 0;

async function open(browser, width, colorScheme, bypassCSP) {
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, bypassCSP, offline: true });
  const page = await context.newPage();
  const said = [], requests = [];
  page.on("console", (message) => said.push(message.text()));
  page.on("pageerror", (error) => said.push(String(error)));
  page.on("request", (request) => requests.push(request.url()));
  const start = Date.now();
  await page.goto(`file://${path.resolve(file)}`);
  const ms = Date.now() - start;
  await page.evaluate(() => document.querySelectorAll("details").forEach((item) => { item.open = true; }));
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  return { context, page, said, requests, ms };
}

(async () => {
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: options });
  for (const scheme of ["light", "dark"]) {
    for (const width of [1280, 390]) {
      const { context, page, said, requests, ms } = await open(browser, width, scheme, true);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      await page.screenshot({ path: `${prefix}-${scheme}-${width}.png`, fullPage: true });
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
      const others = requests.filter((url) => !url.startsWith("file:") && !url.startsWith("data:"));
      const found = [...said, ...others, ...violations.map((item) => `axe ${item.id}: ${item.nodes[0].html.slice(0, 200)}`)];
      wrong += found.length + (wide > 0) + (ms >= 2000);
      console.log(`${scheme} ${width}: painted after ${ms} ms, ${wide} pixels too wide, ${found.length} findings`, found);
      await context.close();
    }
  }
  const { page, said } = await open(browser, 1280, "light", false);
  const shown = () => page.evaluate(() => [...document.querySelectorAll("tbody tr")].filter((row) => !row.hidden).length);
  const all = await shown();
  await page.fill("#filter", "no node has this name");
  const few = await shown();
  await page.fill("#filter", "");
  await page.click("table.sortable th button");
  const sorted = await page.evaluate(() => document.querySelector("[aria-sort]") !== null);
  await page.pdf({ path: `${prefix}.pdf`, format: "A4" });
  wrong += said.length + !(few < all) + !sorted;
  console.log(`under its own policy: ${all} rows, ${few} of them filtered, sorted: ${sorted}`, said);
  await browser.close();
  process.exit(wrong ? 1 : 0);
})();
