// Writes the one file of libraries that the page loads, and their licences next to it.

import { build } from "esbuild";
import { existsSync, readFileSync, writeFileSync } from "node:fs";

const TARGET = new URL("../src/paceline/server/page/vendor/", import.meta.url);
const read = (path) => readFileSync(new URL(path, import.meta.url), "utf8");

/** Names of the packages whose code is in the bundle, by what esbuild read. */
function packagesIn(metafile) {
  const names = Object.keys(metafile.inputs).map(
    (path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1],
  );
  return [...new Set(names)].filter(Boolean).sort();
}

function licenceOf(name) {
  const folder = `node_modules/${name}/`;
  const { version, license } = JSON.parse(read(`${folder}package.json`));
  const file = ["LICENSE", "LICENSE.md", "LICENSE.txt", "LICENSE-MIT.txt"].find((candidate) =>
    existsSync(new URL(folder + candidate, import.meta.url)),
  );
  if (!file) throw new Error(`no licence text in ${folder}`);
  return `${name} ${version} (${license})\n\n${read(folder + file).trim()}\n`;
}

const { metafile } = await build({
  entryPoints: ["entry.js"],
  absWorkingDir: new URL(".", import.meta.url).pathname,
  outfile: new URL("libraries.js", TARGET).pathname,
  bundle: true,
  minify: true,
  charset: "utf8",
  format: "esm",
  target: "es2022",
  legalComments: "none",
  metafile: true,
  banner: { js: "// Built by web/build.js from npm packages; their licences are in LICENSES.txt." },
});
const rule = `\n${"-".repeat(80)}\n\n`;
writeFileSync(new URL("LICENSES.txt", TARGET), packagesIn(metafile).map(licenceOf).join(rule));
